"""Every page and figure of studies and benchmarks from their raw rows: measures and trains nothing.

python -m results.make
"""

from corral.lab.run.files import write_whole
from results import timings
from results.deployed import page as deployed
from results.evidence import page as evidence
from results.pages import Texts
from results.robots import page as robots

STUDIES = (deployed, evidence, robots)


def pages() -> Texts:
    """Every page that a study or a benchmark writes into, as the raw rows have it."""
    texts: Texts = {}
    for study in (*STUDIES, timings):
        texts |= study.pages(lambda path, texts=texts: texts.get(path) or path.read_text())
    return texts


def main() -> None:
    """Write pages and figures."""
    for path, text in pages().items():
        write_whole(path, lambda beside, text=text: beside.write_text(text))
    for study in STUDIES:
        study.draw()


if __name__ == "__main__":
    main()
