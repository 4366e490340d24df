-- Run once, by the owner of an empty Postgres: Prefect and MLflow each need a database of their own, because both keep
-- the version of their tables in a table of one name.
CREATE DATABASE prefect;
CREATE DATABASE mlflow;
