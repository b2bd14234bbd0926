"""The GitHub workflow, which cannot run here: that it is YAML, and names what exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
CI = (ROOT / ".ci" / "run").read_text()


@pytest.fixture(scope="module")
def jobs() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    jobs: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())["jobs"]
    return jobs


def test_every_job_ends_and_names_its_versions(jobs: dict[str, Any]) -> None:
    assert set(jobs) == {"linux", "oldest", "macos"}
    for job in jobs.values():
        assert 0 < job["timeout-minutes"] <= 90
        assert re.fullmatch(r"(ubuntu|macos)-\d+(\.\d+)?", job["runs-on"])
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            assert re.fullmatch(r"actions/[a-z-]+@v\d+", step.get("uses", "actions/x@v1"))


def test_steps_run_what_exists(jobs: dict[str, Any]) -> None:
    scripts = "\n".join(step["run"] for job in jobs.values() for step in job["steps"] if "run" in step)
    paths = re.findall(r"(?:tests|\.ci)/[\w.]+", scripts)
    assert {".ci/run", "tests/test_doctor.py"} <= set(paths)
    assert all((ROOT / path).is_file() for path in paths)
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
    extras = (ROOT / "pyproject.toml").read_text()
    for names in re.findall(r"'\.\[([\w,]+)\]'", scripts):
        assert all(re.search(rf"^{name} = \[", extras, re.M) for name in names.split(","))


def test_macos_installs_the_oracles_of_the_other_systems(jobs: dict[str, Any]) -> None:
    (install,) = [step["run"] for step in jobs["macos"]["steps"] if step.get("name") == "Install"]
    versions = re.findall(r"\b(?:torch|torchvision)==[\d.]+", CI)
    assert len(versions) == 2 and all(version in install for version in versions)


def test_a_failing_doctor_does_not_stop_the_tests(jobs: dict[str, Any]) -> None:
    steps = {step.get("name"): step for step in jobs["macos"]["steps"]}
    names = list(steps)
    assert names.index("Doctor") < names.index("Tests")
    assert "!cancelled()" in steps["Tests"]["if"]
    assert not any("continue-on-error" in step for step in steps.values())
