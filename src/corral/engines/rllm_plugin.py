"""rLLM plug-in, loaded with `+rllm.algorithm.loss_plugins=[corral.engines.rllm_plugin]`. Importing it registers objectives."""

from corral.engines.rllm import register

LOSSES = register()
