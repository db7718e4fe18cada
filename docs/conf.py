"""The documentation site: Sphinx with MyST, MyST-NB and the PyData theme. `make docs` builds it (tools/docs)."""

import sys
from pathlib import Path

import ddp_notebook

sys.path.insert(0, str(Path(__file__).parent))

project = "ddp_notebook"
author = "ddp_notebook contributors"
copyright = author
release = version = ddp_notebook.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "docstrings",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
root_doc = "index"
exclude_patterns = ["extra", "measurements"]

# ---- texts and notebooks

myst_enable_extensions = ["attrs_block", "colon_fence", "deflist"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # tools/docs has executed them
suppress_warnings = ["misc.highlighting_failure"]  # of cells that are more than Python: `!echo`, `%timeit`
nb_merge_streams = True
nb_ipywidgets_js: dict[str, dict[str, str]] = {}  # they would come from elsewhere, and nothing here needs them
copybutton_selector = "div:not(.output) > div.highlight > pre"
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True

# ---- docstrings

default_role = "py:obj"  # a name in backticks is a link where it is documented, else code
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 160  # with the full names of types, of which the last part is shown
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Source", "notes_style")]
napoleon_use_ivar = True
napoleon_attr_annotations = False  # docstrings.py has them as they are written
napoleon_use_param = False  # "a, b: words" stays one entry
napoleon_use_rtype = False
add_module_names = False
toc_object_entries_show_parents = "hide"

# ---- the site

html_theme = "pydata_sphinx_theme"
html_title = "ddp_notebook"
html_baseurl = ""
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_extra_path = ["extra"]
html_copy_source = False
html_search_scorer = str(Path(__file__).parent / "static" / "scorer.js")  # tasks before the design of the code
html_show_search_summary = False  # they are fetched, which a browser forbids to a page from a folder
html_theme_options = {
    "logo": {"text": "ddp_notebook"},
    "navbar_align": "left",
    "header_links_before_dropdown": 6,
    "show_toc_level": 2,
    "show_nav_level": 1,
    "navigation_with_keys": False,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
_WITHOUT_SIDEBAR = ("index", "play", "CONTRIBUTING", "CHANGELOG", "tests/**", "search")
html_sidebars: dict[str, list[str]] = {page: [] for page in _WITHOUT_SIDEBAR}
html_use_index = False
html_domain_indices = False
html_context = {"default_mode": "auto"}
