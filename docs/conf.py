"""Settings of the documentation builder. Build with scripts/check, or: sphinx-build -W docs docs/_build/html"""

from importlib.metadata import version as distribution_version

project = "batch_inference"
author = "The batch_inference authors"
release = version = distribution_version("batch-inference-host")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
default_role = "code"  # `name` in a docstring is code

html_theme = "furo"
html_title = f"{project} {release}"

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3  # so that pages can link to #headings, as on a forge

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"

_attributes: dict[str, list[str]] = {}


def _keep(app, what, name, obj, options, lines):
    if what == "attribute":
        _attributes[name] = list(lines)


def _restore(app, what, name, obj, options, lines):
    if what == "attribute":
        lines[:] = _attributes[name]


def setup(app):
    """Napoleon reads "A rule: its reason." in an attribute's docstring as a type and a text; keep it from doing so."""
    app.connect("autodoc-process-docstring", _keep, priority=400)  # napoleon has 500
    app.connect("autodoc-process-docstring", _restore, priority=600)
