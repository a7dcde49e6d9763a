-- A round that nobody has made yet.
INSERT INTO kfs_credentials_round (name, found) VALUES (%(name)s, 0) ON CONFLICT DO NOTHING RETURNING name
