"""Pipe-Déjàvu's engine: capture, costs, search, bind, trials and training. It knows neither Prefect nor its flows."""
