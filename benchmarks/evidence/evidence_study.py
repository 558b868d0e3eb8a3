"""The runs behind docs/results/llm.md, many side by side: the study of deployed networks with other plans.

    OMP_NUM_THREADS=1 python benchmarks/evidence/evidence_study.py --plan a g --workers 16 --minutes 8 --out results

Runs that a file of either study already has are skipped. `--list` says what would run, `--table` what the results are.
"""

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "deployed"))

import study  # noqa: E402  # beside the plans it runs, and found by the line above
from coarse_sampler import sampling_in  # noqa: E402
from evidence_plans import PLANS  # noqa: E402
from evidence_spec import OWN_OBJECTIVES, Run  # noqa: E402

from corral import register_objective  # noqa: E402

plain = study.shipped_run.run


def run(spec: Run, deadline: float) -> dict[str, Any]:
    """A run of the study's, by a sampler in lower precision where the spec names one."""
    with sampling_in(spec.sampler) if spec.sampler else nullcontext():
        return plain(spec, deadline)


if __name__ in ("__main__", "__mp_main__"):  # in every process of the study; a test that imports this file is none
    study.PLANS, study.shipped_run.run = PLANS, run
    for name, objective in OWN_OBJECTIVES.items():
        register_objective(name, *objective)

if __name__ == "__main__":
    done = [str(HERE / "results"), str(HERE.parent / "deployed/results")]
    sys.argv += [] if "--done" in sys.argv else ["--done", *done]
    study.main()
