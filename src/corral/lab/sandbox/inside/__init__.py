"""Code that runs inside the sandbox: plain Python and system calls, no import from the rest of the package.

The files of this folder are handed as code objects to a bare interpreter, which registers them under their own names; so
they may import each other and the standard library, and nothing else.
"""
