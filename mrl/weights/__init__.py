"""The one home of layout arithmetic: layouts, pieces, plans. No process group, no GPU."""
