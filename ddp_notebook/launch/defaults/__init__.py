"""The file with default options of a site or a user: `~/.config/ddp_notebook.toml`.

file  find, parse and check the file
"""
