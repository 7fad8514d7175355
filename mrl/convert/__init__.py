"""One checkpoint format into another: the conversion, its proof, its command line."""
