DROP TABLE "kfs_credentials_acknowledgement";
DROP TABLE "kfs_credentials_secret_object";
