"""The report of a run, or of several: one HTML page with numbers, pictures and what they mean.

:mod:`.history` and :mod:`.samples` read the files that a run left, :mod:`.figures` sums them up in numbers,
:mod:`.pictures` draws them. :mod:`.page` puts the page of a run together and :mod:`.compare` that of several.
"""
