"""The rules of the edition, one file per rule or small family of rules; `edition.py` collects them."""
