"""`make_corpus.py` writes the corpus and is run by hand: it is no test."""

collect_ignore = ["make_corpus.py", "idioms.py"]
