"""The page of an audit: tables, figures without a script, and completions token by token."""
