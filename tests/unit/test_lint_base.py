"""The commit since which `make lint` checks files."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[1] / "lint_base.sh"
NAMES = ("AUTHOR_NAME", "AUTHOR_EMAIL", "COMMITTER_NAME", "COMMITTER_EMAIL")


class Repository:
    """A repository with a commit for each number."""

    def __init__(self, folder: Path, commits: int) -> None:
        self._folder = folder
        # Neither a hook's variables nor the user's settings count.
        outside = {name: value for name, value in os.environ.items() if name[:4] != "GIT_"}
        self._environment = {**outside, "GIT_CONFIG_GLOBAL": "/dev/null"}
        self._environment |= {f"GIT_{name}": "tests" for name in NAMES}
        self.run("git", "init", "--quiet")
        self.commits = [self.commit(str(number)) for number in range(commits)]

    def run(self, *command: str) -> str:
        done = subprocess.run(
            command,
            cwd=self._folder,
            env=self._environment,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    def commit(self, message: str) -> str:
        self.run("git", "commit", "--quiet", "--allow-empty", "-m", message)
        return self.run("git", "rev-parse", "HEAD")

    def base(self) -> str:
        return self.run("sh", str(PROGRAM))


@pytest.mark.parametrize("main", ["origin/main", "origin/HEAD"])
def test_a_branch_is_checked_since_it_left_the_remotes_main(tmp_path: Path, main: str) -> None:
    repository = Repository(tmp_path, 8)
    repository.run("git", "tag", "v1", repository.commits[5])
    repository.run("git", "update-ref", f"refs/remotes/{main}", repository.commits[1])
    assert repository.base() == repository.commits[1]


def test_the_remotes_main_is_checked_since_the_last_release(tmp_path: Path) -> None:
    repository = Repository(tmp_path, 8)
    repository.run("git", "update-ref", "refs/remotes/origin/main", "HEAD")
    assert repository.base() == repository.commits[2]
    repository.run("git", "tag", "v1", repository.commits[0])
    assert repository.base() == "v1"
    repository.run("git", "tag", "v2", repository.commits[7])  # a release is checked as a whole
    assert repository.base() == "v1"


def test_a_short_history_is_checked_since_its_begin(tmp_path: Path) -> None:
    repository = Repository(tmp_path, 2)
    assert repository.base() == repository.commits[0]
