"""Checks of the wheels, each in a separate environment."""

from __future__ import annotations

import json
import re
import shutil
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

from tools.smoke.environment import NATIVE, PURE, Environment, SmokeError, run, wheels_of
from tools.workspace import ROOT, Package, packages

SERVES = ("ed-models", "ed-esurge")
NOT_FOR_SERVING = ("ed-trainers", "ed-data", "ed-elarge", "datasets", "lm-eval", "torch")


@dataclass(frozen=True)
class Plan:
    """Settings of the environments: folder, Python version and resolution."""

    scratch: Path
    dist: Path
    python: str
    resolution: str = "highest"

    def fresh(self, label: str) -> Environment:
        """Create an empty environment in a temporary folder."""
        return Environment.create(self.scratch / label, self.python)


def imports(package: Package, plan: Plan) -> None:
    """Check that every module of a package imports with the declared dependencies only.

    A module may need an extra: then it fails without the extra and imports with it.
    """
    began = time.monotonic()
    plain = plan.fresh(f"{package.name}-imports")
    plain.install([package], plan.dist, resolution=plan.resolution)
    modules = package.submodules(plain.site_packages())
    missing_from_wheel = set(package.submodules()) - set(modules)
    if missing_from_wheel:
        raise SmokeError(f"not in the wheel of {package.name}: {sorted(missing_from_wheel)}")
    failed = _failures(plain, modules)
    if failed and package.project.get("optional-dependencies"):
        ours = {module for member in packages() for module in member.modules}
        for failure in failed.values():
            if not failure["missing"] or failure["missing"].split(".")[0] in ours:
                raise SmokeError(_summary(package, failed))
        print(f"   with its extras only: {', '.join(failed)}", flush=True)
        extra = plan.fresh(f"{package.name}-extras")
        extra.install([package], plan.dist, resolution=plan.resolution, extras=True)
        failed = _failures(extra, list(failed))
    if failed:
        raise SmokeError(_summary(package, failed))
    jax = plain.installed().get("jax", "none")
    seconds = time.monotonic() - began
    print(
        f"{package.name} {package.version}: {len(modules)} modules import from the wheel "
        f"({plan.resolution}, Python {plan.python}, jax {jax}; {seconds:.0f} s)",
        flush=True,
    )


def _failures(environment: Environment, modules: list[str]) -> dict[str, dict[str, str]]:
    return json.loads(environment.inside("import_modules.py", *modules))


def _summary(package: Package, failed: dict[str, dict[str, str]]) -> str:
    """Return one line for each module, and the traceback of the first module."""
    tracebacks = [failure["traceback"].rstrip() for failure in failed.values()]
    lines = [
        f"{name}: {text.splitlines()[-1]}" for name, text in zip(failed, tracebacks, strict=True)
    ]
    text = "\n".join([*lines, "", tracebacks[0]])
    return f"{package.name}: modules that do not import with the declared dependencies:\n{text}"


def serves(plan: Plan) -> None:
    """Check that ed-models and ed-esurge serve a model without dependencies of the trainers."""
    alone = plan.fresh("inference-only")
    alone.install(_named(SERVES), plan.dist, resolution=plan.resolution)
    installed = alone.installed()
    unwanted = [name for name in NOT_FOR_SERVING if name in installed]
    if unwanted:
        raise SmokeError(f"installing {' and '.join(SERVES)} brought {', '.join(unwanted)}")
    print(
        f"inference only: {len(installed)} distributions, {alone.size() / 1e6:.0f} MB, "
        f"none of {', '.join(NOT_FOR_SERVING)} (jax {installed['jax']}, Python {plan.python})",
        flush=True,
    )
    print(alone.inside("serve.py", env={"JAX_PLATFORMS": "cpu"}).rstrip(), flush=True)


def both_kinds(plan: Plan) -> None:
    """Check that the platform wheel contains its library, and that the pure wheel works."""
    (package,) = _named((NATIVE,))
    for wheel in wheels_of(package, plan.dist):
        pure = wheel.name.endswith(PURE)
        environment = plan.fresh("pure" if pure else "native")
        alone = environment.folder / "dist"
        alone.mkdir()
        for path in plan.dist.glob("*.whl"):
            if path == wheel or not path.name.startswith(wheel.name.split("-")[0] + "-"):
                shutil.copy(path, alone)
        environment.install([package], alone, resolution=plan.resolution)
        output = environment.inside("native.py", env={"JAX_PLATFORMS": "cpu"}).strip()
        if pure != ("not built" in output):
            raise SmokeError(f"{wheel.name} prints {output!r}")
        print(f"{wheel.name}: {wheel.stat().st_size / 1e3:.0f} kB; {output}", flush=True)


def own_tests(package: Package, plan: Plan, *pytest_arguments: str) -> None:
    """Run the tests of a package with its wheel, outside the workspace."""
    environment = plan.fresh(f"{package.name}-tests")
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    environment.install(
        [package],
        plan.dist,
        resolution=plan.resolution,
        extras=True,
        requirements=tools["dependency-groups"]["test"],
    )
    # The same layout as in the repository, because tests use the examples, but without any sources.
    here = environment.folder
    own = Path("packages", package.folder.name)
    shutil.copytree(package.folder / "tests", here / own / "tests")
    shutil.copy(package.folder / "README.md", here / own / "README.md")
    shutil.copytree(ROOT / "examples", here / "examples")
    shutil.copy(ROOT / "conftest.py", here / "conftest.py")
    (here / "pytest.ini").write_text(_pytest_settings(), encoding="utf-8")
    command = (environment.python, "-m", "pytest", *pytest_arguments, own / "tests")
    run(*command, cwd=here, show=True)


def _pytest_settings() -> str:
    """Return the workspace's pytest settings as an ini file without paths."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    settings = tomllib.loads(text)["tool"]["pytest"]["ini_options"]
    lines = ["[pytest]"]
    for name, value in settings.items():
        if name in {"testpaths", "pythonpath"}:
            continue
        if name == "addopts":
            value = " ".join(f"'{part}'" if " " in part else part for part in value)
        if isinstance(value, list):
            value = "".join(f"\n  {line}" for line in value)
        lines.append(f"{name} = {str(value).lower() if isinstance(value, bool) else value}")
    return re.sub(r"\n\n+", "\n", "\n".join(lines)) + "\n"


def _named(names: tuple[str, ...]) -> list[Package]:
    return [package for package in packages() if package.name in names]
