"""Programs for those who work on Penstock; nothing here is part of the package."""
