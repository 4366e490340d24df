"""Taking times on a machine that is not quiet: clocks, repeats, what other work did to them."""
