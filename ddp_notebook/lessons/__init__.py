"""Temporary."""

from ddp_notebook.lessons.checks import check as check
from ddp_notebook.lessons.exchanges import exchanges as exchanges
from ddp_notebook.lessons.places import places as places
