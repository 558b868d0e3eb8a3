"""The former place of `corral.naming`."""

from corral.naming import ALSO_CALLED, build_config, check_keys, nearest

__all__ = ["ALSO_CALLED", "build_config", "check_keys", "nearest"]
