"""Plug-in for rLLM, `+rllm.algorithm.loss_plugins=[corral.engines.rllm_plugin]`. Importing it registers every objective."""

from corral.engines.rllm import register

LOSSES = register()
