"""Adapters to the engines that train on clusters: engine tensors → TokenBatch → objective → the engine's reduction."""
