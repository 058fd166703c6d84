"""The report of a run, or of several: one HTML page with numbers, pictures and what they mean.

:mod:`.history` reads the files that a run left, :mod:`.findings` has what a page is made of; :mod:`.times`,
:mod:`.headlines` and :mod:`.samples` say it, :mod:`.pictures` and :mod:`.overlaid` draw it. :mod:`.page` puts
the page of a run together and :mod:`.compare` that of several.
"""
