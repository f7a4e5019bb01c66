"""Finds recipes: the YAML files of this package, by name, and a user's own, by path. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .errors import UserError, did_you_mean

RECIPES_FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Recipe:
    """A recipe file. `name` is `family/name` for a packaged recipe and the file's stem for a user's own."""

    name: str
    path: Path

    @property
    def family(self) -> str:
        return self.name.rpartition("/")[0]

    @property
    def slug(self) -> str:
        """The name as one folder name: `pretrain/wsm` -> `pretrain-wsm`."""
        return self.name.replace("/", "-")

    @property
    def description(self) -> str:
        """The first comment line of the file."""
        with self.path.open(encoding="utf-8") as file:
            first = file.readline().strip()
        return first.lstrip("# ") if first.startswith("#") else ""

    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")


def packaged_recipes() -> list[Recipe]:
    """Every recipe of the package, sorted by name."""
    paths = sorted(RECIPES_FOLDER.glob("*/*.yaml"))
    return [Recipe(path.relative_to(RECIPES_FOLDER).with_suffix("").as_posix(), path) for path in paths]


def find_recipe(name_or_path: str) -> Recipe:
    """The recipe called `name_or_path`: a packaged name (`pretrain/wsm`) or the path of a YAML file.

    Raises:
        UserError: nothing is there; names the nearest recipes.
    """
    recipes = {recipe.name: recipe for recipe in packaged_recipes()}
    name = name_or_path.removesuffix(".yaml").removesuffix(".yml")
    if name in recipes and not Path(name_or_path).is_file():
        return recipes[name]
    path = Path(name_or_path).expanduser()
    if path.is_file():
        if path.suffix not in (".yaml", ".yml"):
            raise UserError(f"{name_or_path} is not a recipe: a recipe is a .yaml file (see `lightning list`).")
        return Recipe(path.stem, path.resolve())
    if path.is_dir() and (path / "config.yaml").is_file():
        raise UserError(
            f"{name_or_path} is the folder of a run: go on with it by `lightning run RECIPE --resume {path}`."
        )
    bare = [recipe for recipe in recipes if recipe.rpartition("/")[2] == name]
    hint = (
        f" Did you mean {bare[0]}?"
        if bare
        else did_you_mean(name, recipes, otherwise="`lightning list` shows them all.")
    )
    raise UserError(f"No recipe or file is called {name_or_path!r}.{hint}")


def format_catalog() -> str:
    """The recipes with their one-line descriptions, a block a family."""
    lines: list[str] = []
    family = None
    recipes = packaged_recipes()
    width = max((len(recipe.name) for recipe in recipes), default=0)
    for recipe in recipes:
        if recipe.family != family:
            lines += ([""] if lines else []) + [recipe.family]
            family = recipe.family
        lines.append(f"  {recipe.name:<{width}}  {recipe.description}")
    return "\n".join(lines)
