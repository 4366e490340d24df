"""Training as people do it: losses of every plan beside one process's, and throughput beside plain torch."""
