"""Side-by-side measurements with peers: one folder per question, one command each.

Nothing here is imported by the package or by its tests.
"""
