"""The runs behind docs/results/llm.md, many side by side: the study of deployed networks with other plans.

    OMP_NUM_THREADS=1 python benchmarks/evidence/evidence_study.py --plan a g --workers 16 --minutes 8 --out results

Runs that a file of either study already has are skipped. `--list` says what would run, `--table` what the results are.
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "deployed"))

import study  # noqa: E402  # beside the plans it runs, and found by the line above
from evidence_plans import PLANS  # noqa: E402

study.PLANS = PLANS

if __name__ == "__main__":
    done = [str(HERE / "results"), str(HERE.parent / "deployed/results")]
    sys.argv += [] if "--done" in sys.argv else ["--done", *done]
    study.main()
