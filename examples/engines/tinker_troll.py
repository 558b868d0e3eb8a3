"""TROLL on Tinker: a datum and the loss, computed here as Tinker's client would call it. Needs: pip install tinker==0.38.0

python examples/engines/tinker_troll.py        no server is called
"""

import tinker
import torch

from corral.engines.tinker import make_loss, support_targets

# What sampling with topk_sample_logprobs=2 reported of three tokens.
tokens, logp = torch.tensor([3, 1, 2]), torch.tensor([-1.0, -2.5, -0.5])
top_ids, top_logp = torch.tensor([[3, 5], [7, 8], [2, 4]]), torch.tensor([[-1.0, -1.5], [-0.7, -1.2], [-0.5, -2.0]])
fields = support_targets(tokens, top_ids, top_logp, logp)
fields |= {"advantages": torch.tensor([1.0, -1.0, 0.5]), "mask": torch.ones(3)}
datum = tinker.Datum(model_input=tinker.ModelInput.from_ints([9, 3, 1]), loss_fn_inputs=fields)
loss_fn = make_loss("troll", bound=0.01)

# On a server: training_client.forward_backward_custom([datum], loss_fn).result()
new = (fields["logprobs"].clamp(min=-20.0) + torch.tensor([0.3, 0.0, -0.3])).requires_grad_()  # what a server would report
loss, metrics = loss_fn([datum], [new])
loss.backward()
print(f"loss {loss:.3f}, tokens outside the region {metrics['tr/active_frac']:.2f}, KL before {metrics['tr/kl_before']:.3f}")
