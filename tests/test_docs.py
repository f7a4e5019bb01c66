"""README and docs: links lead somewhere, recipes they name exist, and the YAML they show is valid."""

import re
from pathlib import Path

import pytest
import yaml

from fulgurite.recipes.catalog import find_recipe, packaged_recipes
from fulgurite.recipes.overrides import load_recipe
from fulgurite.recipes.validation import check_config

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_pictures_exist(page):
    targets = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text())
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_recipes_named_in_commands_exist(page):
    for name in re.findall(r"lightning (?:run|submit|show) ([a-z]+/[a-z0-9-]+)", page.read_text()):
        assert find_recipe(name).name == name


def test_the_readme_lists_every_recipe():
    listed = set(re.findall(r"^\| `([a-z]+/[a-z0-9-]+)` \|", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert listed == {recipe.name for recipe in packaged_recipes()}


def test_recipe_sections_shown_in_the_docs_fit_the_recipe():
    blocks = [block for page in PAGES for block in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)]
    assert blocks
    for block in blocks:
        config = load_recipe(find_recipe("pretrain/wsm").path) | yaml.safe_load(block)
        check_config(config, "docs")
