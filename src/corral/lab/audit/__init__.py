"""Audits of a run's tokens: which tokens clipping blocks, and which tokens true trust regions would act on."""
