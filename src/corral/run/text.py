"""Numbers and things in sentences."""


def count(number: int, thing: str) -> str:
    """1 step, 2 steps."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
