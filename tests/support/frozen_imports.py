"""Exempts what was imported before this from garbage collections, also in forked processes."""

import gc

gc.freeze()
