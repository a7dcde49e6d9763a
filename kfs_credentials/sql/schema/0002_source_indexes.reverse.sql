-- Only our own index goes; the seed's objects may not be ours.
DROP INDEX IF EXISTS "kfs_credentials_legacy_idx";
