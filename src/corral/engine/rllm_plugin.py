"""What rLLM imports for `+rllm.algorithm.loss_plugins=[corral.engine.rllm_plugin]`: importing it registers every objective."""

from corral.engine.rllm import register

LOSSES = register()
