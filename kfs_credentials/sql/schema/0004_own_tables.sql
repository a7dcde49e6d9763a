-- What the seed's columns cannot hold, in tables of our own.
CREATE TABLE "kfs_credentials_secret_object" (
  "credential_ref" TEXT PRIMARY KEY NOT NULL,
  "store" TEXT NOT NULL,
  "key_id" TEXT,
  "size" INTEGER,
  "created_at" TIMESTAMPTZ NOT NULL,
  "updated_at" TIMESTAMPTZ NOT NULL
);

CREATE TABLE "kfs_credentials_acknowledgement" (
  "source_id" UUID PRIMARY KEY NOT NULL,
  "shape" TEXT NOT NULL,
  "acknowledged_by" TEXT NOT NULL,
  "acknowledged_at" TIMESTAMPTZ NOT NULL
);
