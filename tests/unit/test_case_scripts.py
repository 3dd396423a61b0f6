"""The scripts of `make cases` that judge themselves."""

from __future__ import annotations

from pathlib import Path

import case_scripts
import pytest

SOURCED = ". judge.sh || true\n"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("echo right\n", "SKIP 20-x: the script does not judge itself; a marked test does"),
        (f"{SOURCED}echo about; echo 'ok 20-x: up'\n", "ok 20-x: up"),
        (f"{SOURCED}echo 'SKIP 20-x: one CPU'; exit 77\n", "SKIP 20-x: one CPU"),
        (f"{SOURCED}echo 'FAIL 20-x: got 1, wanted 2'; exit 1\n", "FAIL 20-x: got 1, wanted 2"),
        (f"{SOURCED}exit 3\n", "FAIL 20-x: got status 3 and '', wanted a judgement"),
        (f"{SOURCED}sleep 600\n", "FAIL 20-x: got no end within 0.5 s, wanted one"),
    ],
)
def test_a_script_ends_with_a_judgement(tmp_path: Path, text: str, line: str) -> None:
    script = tmp_path / "20-x.sh"
    script.write_text(text.replace(". judge.sh", f". {tmp_path}/judge.sh"))
    (tmp_path / "judge.sh").touch()
    assert case_scripts.judge(script, 0.5 if "sleep" in text else 60.0) == line


def test_one_wrong_script_fails_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert case_scripts.main(tmp_path) == 1
    (tmp_path / "judge.sh").touch()
    for name, word in (("20-a", "ok"), ("21-b", "FAIL")):
        said = f". {tmp_path}/judge.sh\necho '{word} {name}: x'\n"
        (tmp_path / f"{name}.sh").write_text(said)
    capsys.readouterr()
    assert case_scripts.main(tmp_path) == 1
    assert capsys.readouterr().out == "ok 20-a: x\nFAIL 21-b: x\n"
    (tmp_path / "21-b.sh").unlink()
    assert case_scripts.main(tmp_path) == 0
