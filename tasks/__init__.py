"""One thin Prefect task for each arrow of the design: a name, retries and progress around one call of the engine."""
