"""One file per rule, or per small family; `edition.py` lists them."""
