"""Adapters that run corral's objectives in training engines for clusters, such as verl, NeMo-RL and slime."""
