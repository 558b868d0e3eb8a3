"""The type checker that tests run under: beartype, with an int accepted where a float is asked for, as Python itself has it."""

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
