"""Four tokens worked out by hand, over a vocabulary of three. The sampled token is always the first.

    A  old (.005 .595 .400)  new (.010 .590 .400)  Â = +1    ρ = 2      TV = .005
       KL = .01 ln 2 + .59 ln(.59/.595) = .006931 − .004979 = .001953
    B  old (.40 .35 .25)     new (.47 .13 .40)     Â = +1    ρ = 1.175  TV = ½ (.07 + .22 + .15) = .22
       KL = .47 ln 1.175 + .13 ln(.13/.35) + .4 ln 1.6 = .075796 − .128752 + .188001 = .135046
    C  old (.40 .35 .25)     new (.16 .50 .34)     Â = −1    ρ = .4     TV = .24
       KL = .16 ln .4 + .5 ln(.5/.35) + .34 ln 1.36 = −.146607 + .178337 + .104546 = .136277
    D  as C                                        Â = +1

Against ratio 1 ± .2, KL ≤ .05 and TV ≤ .2:
    A is clipped (2 > 1.2) though inside: a false alarm.       DPPO and TROLL leave it alone.
    B is not clipped (1.175 < 1.2) though outside and rising: missed.   |.47 − .40| = .07, so DPPO on the sampled token leaves
      it too; on two tokens and the rest, which is everything here, it masks. TROLL projects to .05.
    C is clipped (.4 < .8), outside and falling: right.        |.16 − .40| = .24: DPPO masks either way. TROLL projects.
    D is not clipped, outside, and on its way back.            DPPO leaves it. TROLL projects whatever Â says.
"""

import numpy as np
import pandas as pd
import torch

from corral.lab.audit.measure import measure
from corral.lab.audit.rules import Rules

OLD = torch.tensor([[0.005, 0.595, 0.4], [0.4, 0.35, 0.25], [0.4, 0.35, 0.25], [0.4, 0.35, 0.25]]).log()
NEW = torch.tensor([[0.01, 0.59, 0.4], [0.47, 0.13, 0.4], [0.16, 0.5, 0.34], [0.16, 0.5, 0.34]]).log()
ADVANTAGES = torch.tensor([1.0, 1.0, -1.0, 1.0])
TOKENS = torch.zeros(4, dtype=torch.int64)
RULES = Rules(top_k=2)

EXPECTED = {
    "kl": [0.001953, 0.135046, 0.136277, 0.136277],
    "tv": [0.005, 0.22, 0.24, 0.24],
    "tv_binary": [0.005, 0.07, 0.24, 0.24],
    "tv_topk": [0.005, 0.22, 0.24, 0.24],
    "clipped": [True, False, True, False],
    "dppo_binary": [False, False, True, False],
    "dppo_topk": [False, True, True, False],
    "troll": [False, True, True, True],
    "troll_kl": [0.001953, 0.05, 0.05, 0.05],
}


def completion(text: str = "a", **given: object) -> pd.DataFrame:
    """The four tokens as an audit's folder takes them."""
    columns = measure(TOKENS, OLD, NEW, ADVANTAGES, RULES)
    rows = {"token": TOKENS, "text": [text] * 4, "position": torch.arange(4), "advantage": ADVANTAGES}
    return pd.DataFrame({name: np.asarray(column) for name, column in {**columns, **rows, **given}.items()})
