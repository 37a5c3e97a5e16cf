"""Settings of the site. `sphinx-build -W docs site` builds it, without a network."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import docstrings  # noqa: E402
import pages  # noqa: E402

import ppl_bnn  # noqa: E402

project = "ppl_bnn"
author = "The ppl_bnn maintainers"
copyright = f"2026, {author}"
version = release = ppl_bnn.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.viewcode",
    "numpydoc",
    "myst_parser",
    "sphinx_design",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
    "sphinx-mathjax-offline",
]
templates_path = ["_templates"]
exclude_patterns = ["made/tables/*", "made/examples/*", "tutorials/*", "plots/*"]
suppress_warnings = ["config.cache"]

myst_enable_extensions = ["colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 3

autosummary_generate = True
# Modules by the names that examples use: `ppl_bnn.plot` is `ppl_bnn.reporting.plot`.
autosummary_context = {"public": pages.public_paths()}
autodoc_typehints = "none"
# The classes list their members themselves.
numpydoc_show_class_members = False
numpydoc_xref_param_type = False
copybutton_prompt_text = ">>> "

html_theme = "pydata_sphinx_theme"
html_title = "ppl_bnn"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_favicon = "_static/favicon.svg"
# Also for the index of names, to which the theme gives none.
html_context = {"default_mode": "auto"}
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "logo": {"text": "ppl_bnn"},
    "show_prev_next": False,
    "navigation_with_keys": False,
    "secondary_sidebar_items": ["page-toc"],
    "navbar_align": "left",
    "footer_start": ["copyright"],
    "footer_end": ["theme-version"],
}
html_sidebars = {"index": []}

sphinx_gallery_conf = {
    "examples_dirs": ["tutorials", "plots"],
    "gallery_dirs": ["made_tutorials", "made_plots"],
    # The page of a public name shows the tutorials and plots that use it.
    "doc_module": ("ppl_bnn",),
    "backreferences_dir": "made/examples",
    "inspect_global_variables": False,
    "filename_pattern": r"/plot_",
    "within_subsection_order": "FileNameSortKey",
    "download_all_examples": False,
    "show_memory": False,
    "min_reported_time": 1,
    "matplotlib_animations": False,
    "remove_config_comments": True,
    "abort_on_example_error": True,
    "show_signature": False,
    # Its page would load scripts from a network.
    "write_computation_times": False,
}


def items_of_lists(app, pagename, templatename, context, doctree):
    """Make references items of their list, which the role that docutils gives them no longer does in ARIA."""
    if "body" in context:
        context["body"] = context["body"].replace('role="doc-biblioentry"', 'role="listitem"')


def setup(app):
    """Read docstrings as plain text, before numpydoc does; write the pages that are made."""
    app.connect("autodoc-process-docstring", docstrings.plain, priority=400)
    app.connect("autodoc-process-signature", docstrings.signature)
    app.connect("html-page-context", items_of_lists)
    pages.write_all()
