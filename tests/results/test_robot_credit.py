"""The study of credit on the hopper: what the page says of its rows."""

from results.robots import credit as robot_credit


def test_golden_ends_are_compared_with_plain_tce_by_seed() -> None:
    ends = {("tce", "0"): 14.0, ("tce", "2"): 14.5, ("bbrl", "0"): 17.0, ("bbrl", "2"): 18.0}
    runs = [{"row": row, "seed": seed, "curve": [[0, 3.0, 0.0], [2_000_000, paid, 0.25]]} for (row, seed), paid in ends.items()]
    text = robot_credit.block(runs)
    assert "| TCE | 2 | 14.0, 14.5 | 14.2 | 25 | – | – |" in text
    assert "| BBRL | 2 | 17.0, 18.0 | 17.5 | 25 | +3.2 | 1 |" in text
