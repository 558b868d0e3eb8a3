"""Plug-in for `+rllm.algorithm.loss_plugins=[corral.engines.rllm_plugin]`: importing it registers every objective."""

from corral.engines.rllm import register

LOSSES = register()
