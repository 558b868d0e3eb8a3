"""Code that runs inside the sandbox, which imports nothing but the standard library and files of this folder.

The files of this folder are handed as code objects to a bare interpreter, which registers them under their own names; so
they may import each other and the standard library, and nothing else.
"""
