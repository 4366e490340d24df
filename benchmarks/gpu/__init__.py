"""The first minutes with a GPU: predict, measure and train small models on it, in one command of limited time."""
