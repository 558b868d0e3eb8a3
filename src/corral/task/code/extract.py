"""The program in a completion."""

import re
import textwrap

# A fence stands alone on its line, indented or not; a block that is never closed reaches to the end: it was cut.
# *+ and ++ give nothing back: a label of thousands of letters without an end of line would be tried in every split.
_BLOCK = re.compile(r"^[ \t]*+```++[ \t]*+(?P<label>[\w+#.-]*+)[^\n`]*+\n(?P<body>.*?)(?:^[ \t]*+```++[ \t]*$|\Z)", re.M | re.S)
_PYTHON_LABELS = {"python", "python3", "py", "py3"}
_THINK_END = "</think>"


def extract_program(completion: str) -> str:
    """The last block fenced as Python; without one, the last block without a label; without one, the whole text.

    Whatever comes before the last `</think>` does not count. A block that is indented as a whole is moved to the margin.
    """
    text = completion.rpartition(_THINK_END)[2]
    blocks = [(match["label"].lower(), match["body"]) for match in _BLOCK.finditer(text)]
    for wanted in (_PYTHON_LABELS, {""}):
        found = [body for label, body in blocks if label in wanted]
        if found:
            return textwrap.dedent(found[-1])
    return text


def defines(program: str, name: str) -> bool:
    """Whether a program, which need not be valid, defines a name at its top level."""
    name = re.escape(name)
    defined, assigned = rf"^(?:(?:async[ \t]+)?def|class)[ \t]+{name}\b", rf"^{name}[ \t]*(?::[^=\n]*)?=(?!=)"
    return re.search(f"{defined}|{assigned}", program, re.M) is not None
