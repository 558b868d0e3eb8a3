"""What other engines wrote about their tokens: which format it is, and its completions one after the other."""
