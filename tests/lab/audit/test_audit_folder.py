"""An audit on the disk: whole files, one table, clear refusals."""

import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from audit.four_tokens import RULES, completion

from corral.lab.audit.folder import SCHEMA, AuditFolder, MicroBatch, read_audit
from corral.lab.audit.rules import Rules
from corral.lab.audit.tally import audit_table
from corral.lab.audit.words import sentences
from corral.objective import make_objective
from corral.validate import RunError

INFO: dict[str, Any] = {"kind": "test", "rules": RULES.as_dict()}


def written(path: Path, *updates: int) -> Path:
    folder = AuditFolder(path)
    folder.begin(INFO)
    for update in updates:
        folder.add(update, [completion("x"), completion("y")])
    folder.close()
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    info, table = read_audit(written(tmp_path / "audit", 8, 16))
    assert info["kind"] == "test"
    assert info["versions"]["corral"]
    assert [*table] == SCHEMA.names
    assert table["update"].tolist() == [8] * 8 + [16] * 8
    assert table["sequence"].tolist() == 2 * ([0] * 4 + [1] * 4)
    assert table["text"].tolist() == 2 * (["x"] * 4 + ["y"] * 4)
    assert table["logp_rollout"].isna().sum() == 16
    # Anything that reads parquet reads it.
    assert len(pq.read_table(tmp_path / "audit" / "audit.parquet")) == 16
    assert not [path for path in (tmp_path / "audit").rglob("*") if path.name.endswith(".part")]


def test_it_can_be_read_while_it_grows(tmp_path: Path) -> None:
    folder = AuditFolder(tmp_path / "audit")
    folder.begin(INFO)
    folder.add(1, [completion()])
    (folder.table / ".update-00000002.parquet.123.part").write_bytes(b"half a fi")
    assert len(read_audit(tmp_path / "audit")[1]) == 4
    folder.close()


def test_infinite_bounds_come_back(tmp_path: Path) -> None:
    clip = make_objective("ppo_clip", clip_high=math.inf)
    rules = Rules(clip=clip, kl_bound=math.inf, top_k=2).as_dict()  # JSON has no infinity
    for done in (0, 1):  # begun, then gone on with
        folder = AuditFolder(tmp_path / "audit")
        folder.begin({"rules": rules}, done=done)
        folder.add(done + 1, [completion()])
        folder.close()
    info, table = read_audit(tmp_path / "audit")
    assert info["rules"] == rules
    found = sentences(audit_table(info, table))
    assert any("ratio 0.8 … inf" in text and "the KL ball of ∞" in text for text in found), found


def test_going_on_forgets_what_comes_later(tmp_path: Path) -> None:
    path = written(tmp_path / "audit", 8, 16, 24)
    folder = AuditFolder(path)
    folder.begin(INFO, done=16)
    folder.close()
    assert set(read_audit(path)[1]["update"].tolist()) == {8, 16}


def test_updates_that_were_made_are_averaged_as_trl_averages_them(tmp_path: Path) -> None:
    # Shares of micro-batches: 1/4, 0 of no token, 2/2, 0/8; their mean is 1.25/4. TRL's: (.5 + .25)/2.
    folder = AuditFolder(tmp_path / "audit")
    folder.begin(INFO)
    made = [(1, 4, 1, 0.5), (1, 0, 0, None), (2, 2, 2, 0.25)]
    folder.add_updates(2, [MicroBatch(*row) for row in made])
    folder.add(2, [completion()])
    folder.add_updates(3, [MicroBatch(3, 8, 0, None)])
    folder.close()
    expected = {"updates": 3, "micro_batches": 4, "blocked": pytest.approx(1.25 / 4), "trl": pytest.approx(0.375)}
    assert read_audit(tmp_path / "audit")[0]["updates_made"] == expected
    folder.begin(INFO, done=2)
    folder.close()
    assert read_audit(tmp_path / "audit")[0]["updates_made"]["updates"] == 2, "what is repeated is forgotten"


def test_updates_of_another_making_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "audit", 1)
    assert read_audit(path)[0]["updates_made"] is None
    (path / "updates.parquet").mkdir(exist_ok=True)
    pq.write_table(pa.table({"update": [1], "tokens": ["many"]}), path / "updates.parquet" / "update-00000001.parquet")
    with pytest.raises(RunError, match=r"updates\.parquet is not what an audit writes"):
        read_audit(path)


def test_two_processes_do_not_share_a_folder(tmp_path: Path) -> None:
    folder = AuditFolder(tmp_path / "audit")
    folder.begin(INFO)
    with pytest.raises(RunError, match="another process"):
        AuditFolder(tmp_path / "audit").begin(INFO, done=1)
    folder.close()


class TestRefusals:
    def test_an_audit_that_is_there(self, tmp_path: Path) -> None:
        with pytest.raises(RunError, match="holds an audit already"):
            AuditFolder(written(tmp_path / "audit", 1)).begin(INFO)

    def test_something_else_that_is_there(self, tmp_path: Path) -> None:
        (tmp_path / "mine.txt").write_text("precious")
        with pytest.raises(RunError, match="holds no audit"):
            AuditFolder(tmp_path).begin(INFO)
        with pytest.raises(RunError, match="holds no audit"):
            AuditFolder(tmp_path / "mine.txt").begin(INFO)

    def test_other_rules(self, tmp_path: Path) -> None:
        with pytest.raises(RunError, match="by other rules"):
            AuditFolder(written(tmp_path / "audit", 1)).begin({"rules": {**RULES.as_dict(), "kl_bound": 1.0}}, done=1)

    @pytest.mark.parametrize(
        ("spoil", "says"),
        [
            (lambda path: (path / "audit.json").unlink(), "has no audit.json"),
            (lambda path: (path / "audit.json").write_text("{"), "cannot be read"),
            (lambda path: (path / "audit.json").write_text("[]"), "its rules cannot be read"),
            (lambda path: [part.unlink() for part in (path / "audit.parquet").iterdir()], "no tokens yet"),
            (lambda path: next((path / "audit.parquet").iterdir()).write_bytes(b"junk"), "is not what an audit writes"),
            (
                lambda path: pq.write_table(pa.table({"update": [1]}), next((path / "audit.parquet").iterdir())),
                "no token with a number in every column",
            ),
        ],
        ids=["no info", "torn info", "other info", "no tokens", "damaged", "other columns"],
    )
    def test_what_cannot_be_read(self, tmp_path: Path, spoil: Any, says: str) -> None:
        path = written(tmp_path / "audit", 1)
        spoil(path)
        with pytest.raises(RunError, match=says):
            read_audit(path)

    def test_no_folder(self, tmp_path: Path) -> None:
        with pytest.raises(RunError, match="holds no audit"):
            read_audit(tmp_path / "nothing")

    def test_other_types(self, tmp_path: Path) -> None:
        path = written(tmp_path / "audit", 1)
        (part,) = (path / "audit.parquet").iterdir()
        table = pq.read_table(part)
        texts = pa.array(["far"] * len(table))
        pq.write_table(table.set_column(table.column_names.index("kl"), "kl", texts), part)
        with pytest.raises(RunError, match="not what an audit writes"):
            read_audit(path)
        assert json.loads((path / "audit.json").read_text())["rules"]["top_k"] == 2
