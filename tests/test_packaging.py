"""setup.cfg installs the whole tree: every subpackage, and every YAML file as package data."""

import configparser
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("callbacks", "datamodules", "kernels", "lightning_modules", "recipes")


@pytest.fixture(scope="module")
def config():
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser


def lines(text):
    return [line.strip() for line in text.splitlines() if line.strip()]


def files(suffix):
    return sorted(path.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob(f"*{suffix}"))


def dotted(folder):
    return ".".join(("fulgurite", *folder.parts))


def test_every_folder_with_python_files_is_a_listed_package(config):
    assert sorted(lines(config["options"]["packages"])) == sorted({dotted(path.parent) for path in files(".py")})


def test_every_listed_package_has_an_init_file(config):
    with_init = {dotted(path.parent) for path in files("__init__.py")}
    assert set(lines(config["options"]["packages"])) == with_init


def test_folders_are_mapped_into_the_namespace(config):
    mapping = dict(line.replace(" ", "").split("=") for line in lines(config["options"]["package_dir"]))
    assert mapping == {f"fulgurite.{folder}": folder for folder in FOLDERS}


def test_fulgurite_stays_a_namespace_package():
    """An __init__.py, or a package called `fulgurite` on its own, would hide what another distribution adds."""
    assert not (ROOT / "fulgurite").exists()
    assert not (ROOT / "__init__.py").exists()


def test_package_data_covers_every_other_file(config):
    """A file belongs to the nearest package above it; a pattern of package data is relative to that package."""
    packages = set(lines(config["options"]["packages"]))
    patterns = {package: lines(text) for package, text in config["options.package_data"].items()}
    missed = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if not path.is_file() or path.suffix in (".py", ".pyc"):
                continue
            relative = path.relative_to(ROOT)
            owners = [parent for parent in relative.parents if dotted(parent) in packages]
            covered = any(
                len(owner_path.parts) == len(Path(pattern).parts) and fnmatch(str(owner_path), pattern)
                for owner in owners
                for owner_path in [relative.relative_to(owner)]
                for pattern in patterns.get(dotted(owner), [])
            )
            if not covered:
                missed.append(str(relative))
    assert missed == []


def test_constraints_pin_every_requirement(config):
    """`make` installs from constraints.txt: what it does not pin could change under a test overnight."""
    pinned = {
        line.partition("==")[0].lower().replace("_", "-") for line in lines((ROOT / "constraints.txt").read_text())
    }
    extras = "\n".join(config["options.extras_require"].values())
    asked = lines(config["options"]["install_requires"]) + lines(extras)
    names = {line.partition(";")[0].split("[")[0].split(">")[0].split("<")[0].split("=")[0].strip() for line in asked}
    assert {name.lower().replace("_", "-") for name in names} - pinned == set()


def test_constraints_name_versions_only():
    """No path, address or local build of one machine."""
    for line in lines((ROOT / "constraints.txt").read_text()):
        name, equals, version = line.partition("==")
        assert equals, line
        assert name.replace("-", "").replace("_", "").replace(".", "").isalnum(), line
        assert not set(version) & set("+/@ "), line
