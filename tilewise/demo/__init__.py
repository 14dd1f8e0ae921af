"""The demonstration: a small language model trained on real text, then one very long sequence.

`run.demonstrate` does the work and returns a `report.Report`; nothing in here prints, so that the
command line and the tests share it.
"""
