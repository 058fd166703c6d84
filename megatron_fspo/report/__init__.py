"""The report of a run: one HTML page with its numbers, its pictures and what they mean.

:mod:`.history` reads the files that a run left, :mod:`.pictures` draws, :mod:`.page` puts the page together.
"""
