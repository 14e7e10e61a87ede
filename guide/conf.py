"""Sphinx's settings for the guide. guide/build.py runs Sphinx."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

project = "Scaling a modern transformer"
author = "the authors"
html_title = project
extensions = ["myst_parser", "extension"]
myst_enable_extensions = ["colon_fence", "dollarmath", "deflist", "attrs_inline", "attrs_block"]
myst_heading_anchors = 3
html_math_renderer = "mathml"
suppress_warnings = ["epub.unknown_project_files"]
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["guide.css"]
# Scripts use what guide.js defines.
scripts = [path.name for path in Path(__file__).with_name("static").glob("*.js")]
html_js_files = sorted(scripts, key=lambda name: (name != "guide.js", name))
html_show_search_summary = False
html_show_sphinx = False
html_show_copyright = False
highlight_language = "text"  # of blocks without a language: commands and their output
html_copy_source = False
html_theme_options = {"source_repository": "", "navigation_with_keys": True}
pygments_style = "xcode"
pygments_dark_style = "github-dark"
exclude_patterns = ["problems", "README.md"]
nitpicky = True
